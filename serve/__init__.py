"""An OpenAI-compatible server over a batch: what clients send, what they get, and the page at ``/``."""
