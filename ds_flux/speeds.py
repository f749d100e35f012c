"""What accelerators can compute at most."""

# dense bf16 matrix products with fp32 sums, in 1e12 floating-point operations a second: the vendors' data sheets
PEAK_BF16_TFLOPS = {
    "B200": 2250.0, "GH200": 989.4, "H200": 989.4, "H100 PCIe": 756.0, "H100 NVL": 835.0, "H100": 989.4, "A100": 312.0,
    "L40S": 362.05, "RTX 4090": 165.2, "MI300X": 1307.4,
}  # fmt: skip


def peak_tflops(device_name: str) -> float | None:
    """Of a device as it calls itself; None: not known."""
    return next((peak for name, peak in PEAK_BF16_TFLOPS.items() if name in device_name), None)
