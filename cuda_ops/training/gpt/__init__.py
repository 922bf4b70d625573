"""The GPT job, `python -m cuda_ops gpt`: its settings, its training side by side, its checkpoints and its report."""
