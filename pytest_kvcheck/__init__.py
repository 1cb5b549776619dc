"""pytest-kvcheck: proves that LLM inference servers give every KV-cache slot back.

This module imports nothing: the plugin must cost a plain ``pytest`` run as good as nothing.
"""

__version__ = "0.1.0"
