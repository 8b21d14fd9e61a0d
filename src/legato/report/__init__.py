"""What a run says of itself: metrics.jsonl, loggers, the bar, the start block."""
