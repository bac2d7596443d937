"""The networks: ordinary `torch.nn` modules with synthetic batches, losses and optimizers, each under a name.

`names` and `registry` import no torch; the networks are imported when one is built. Every network exists
twice: the `real` one, as a user would recognise it, and a `seed-` one that leaves out what the seed of this
project leaves out (see `style.Style`).
"""
