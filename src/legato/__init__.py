"""Fine-tune language models in native PyTorch, with checkpoints by step that never pause training."""
