"""The importable core: micro-batches, objectives, and one optimizer step over a window."""
