"""The seed's API: builders of its networks (`nn`), `setup_training_graph` and `run_optimization`.

from magis.testing import nn, setup_training_graph, run_optimization

G, y = nn.bert("large", batch_size=64)
G = setup_training_graph(G, y, update_weight=True, inplace=False)
run_optimization(G, "name", mem_limit_ratio=0.8, dump_file=open("results.csv", "a"))
"""

from magis.testing import nn
from magis.testing.seed_api import TrainingGraph, run_optimization, setup_training_graph

__all__ = ["TrainingGraph", "nn", "run_optimization", "setup_training_graph"]
