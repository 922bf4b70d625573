"""The MNIST job, `python -m cuda_ops mnist`: its settings and report, and its training step as one kernel."""
