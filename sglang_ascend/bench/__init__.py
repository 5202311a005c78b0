"""What is asked of a running server over HTTP, and the figures that its answers give."""
