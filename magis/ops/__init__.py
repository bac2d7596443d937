"""Facts about ATen operators, one row per family of operators; split rules; weight updates."""
