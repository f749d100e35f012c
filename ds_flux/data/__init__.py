"""Images and captions; knows no model."""
