"""Export of captured training steps to ONNX, and their runs, measurement and prediction in stock ONNX Runtime."""
