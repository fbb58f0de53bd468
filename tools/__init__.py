"""What makes pages and pictures of the documentation from the source and the committed results."""
