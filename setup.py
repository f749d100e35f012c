"""`pip install -e .` installs ds_flux and the command ds-flux.  The tested versions are in launch/constraints.txt."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (ROOT / "ds_flux/__init__.py").read_text()).group(1)

setup(
    name="ds_flux",
    version=VERSION,
    description="FLUX training with DeepSpeed ZeRO-3",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["ds_flux", "ds_flux.*"]),
    install_requires=[
        "torch>=2.9",
        "deepspeed>=0.19.8,<0.20",
        "diffusers>=0.42,<0.43",
        "transformers>=5.20,<6",
        "peft>=0.21",
        "datasets>=4",
        "tensorboard>=2.18",
        "jsonargparse[signatures]>=4.50",  # typed flags and YAML
        "sentencepiece>=0.2",  # T5's released tokenizer
        "protobuf>=5",
    ],
    extras_require={
        "plot": ["matplotlib>=3.9"],
        "demo": ["scikit-learn>=1.5", "matplotlib>=3.9"],
        "evaluate": ["torch-fidelity>=0.4"],  # FID; brings torchvision, which is not used (launch/install.sh goes without)
        "test": ["pytest>=8", "pytest-timeout>=2.3", "scikit-learn>=1.5", "matplotlib>=3.9", "ruff", "torchmetrics>=1.9"],
    },
    entry_points={"console_scripts": ["ds-flux = ds_flux.__main__:run"]},
)
