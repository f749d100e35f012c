"""Everything DeepSpeed; knows no FLUX."""
