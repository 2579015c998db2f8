"""What an answer's text says besides text: calls of tools, and reasoning."""
