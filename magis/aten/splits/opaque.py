"""Operators that are never split, and why."""

from __future__ import annotations

from magis.aten.splits.labels import Call, Labels, Rule, rows

__all__ = ["RANDOM", "RULES", "because"]

RANDOM = "random numbers would change"


def because(reason: str) -> Rule:
    """A rule that gives a reason instead of labels."""

    def rule(call: Call) -> Labels | str:  # noqa: ARG001
        return reason

    return rule


RULES: dict[str, Rule] = {
    **rows(
        because("numbers depend on where they stand"), "arange range linspace logspace eye tril_indices triu_indices"
    ),
    **rows(because("one number"), "scalar_tensor _local_scalar_dense is_same_size"),
    **rows(because("how many elements there are depends on the contents"), "nonzero masked_select _unique2"),
    **rows(because("bags of an embedding have lengths of their own"), "_embedding_bag _embedding_bag_forward_only"),
    **rows(because(RANDOM), "native_dropout _fused_dropout rrelu_with_noise rand rand_like randn randn_like randint"),
    **rows(because(RANDOM), "bernoulli normal uniform randperm multinomial randint_like exponential"),
    **rows(
        because("updates many tensors at once"),
        "_foreach_add _foreach_sub _foreach_mul _foreach_div _foreach_addcmul _foreach_addcdiv _foreach_lerp"
        " _foreach_sqrt _foreach_neg _foreach_copy _foreach_norm _foreach_pow _foreach_reciprocal _foreach_maximum"
        " _fused_adam _fused_adamw _fused_sgd _fused_adagrad",
    ),
}
