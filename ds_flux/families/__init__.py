"""What differs between FLUX generations, and nothing else."""
