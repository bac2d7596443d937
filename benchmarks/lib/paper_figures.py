"""Figures of the paper that benchmarks compare with."""

from __future__ import annotations

PAPER_LATENCY = {
    "1.1": {"resnet50": 0.51, "bert": 0.47, "vit": 0.37, "unet": 0.26, "unetpp": 0.13, "gpt_neo": 0.42, "btlm": 0.26},
    "1.05": {"resnet50": 0.64, "bert": 0.70, "vit": 0.61, "unet": 0.50, "unetpp": 0.26, "gpt_neo": 0.64, "btlm": 0.43},
}
"""Peak ratio of the paper at a latency limit (RTX 3090, read off its charts, +-0.01)."""
PAPER_MEMORY = {
    "0.8": {"resnet50": 0.03, "bert": 0.02, "vit": 0.045, "unet": 0.02, "unetpp": 0.02, "gpt_neo": 0.05, "btlm": 0.03},
    "0.4": {"resnet50": 0.13, "bert": 0.15, "vit": 0.10, "unet": 0.06, "unetpp": 0.04, "gpt_neo": 0.10, "btlm": 0.08},
}
"""Latency overhead of the paper at a memory limit."""
