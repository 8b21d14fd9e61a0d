"""The loop, its step, and what a resumed run needs to know of both."""
