"""What `python -m cuda_ops race` does with any model: subject.py finds it and makes its inputs, measure.py times its
training step and its layers, parity.py compares what it computes, report.py writes that down."""
