"""Built-in networks: ordinary `torch.nn` modules with synthetic batches, losses and optimizers.

Every network has two variants: the `real` one follows its publication, the `seed-` one leaves out the same parts as the
seed of this project (see `building.Style`).
"""
