"""A captured training step as an ONNX graph that stock ONNX Runtime runs, its memory measured and predicted."""
