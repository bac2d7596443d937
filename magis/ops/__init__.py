"""Facts about ATen operators, one declaration per family."""
