"""vLLM on a CPU: how to install it, and a start-up patch that plants faults."""
