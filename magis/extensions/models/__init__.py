"""Networks: ordinary `torch.nn` modules with synthetic batches, losses and optimizers.

Every network exists twice: the `real` one, as a user would recognise it, and a `seed-` one that leaves out what the
seed of this project leaves out (see `building.Style`).
"""
