"""A bundle file becomes something that runs, with its buffers bound once."""
