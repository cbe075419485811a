"""Step sizes and bounds of the papers' theorems, for constants that you know: `partita.theory`."""

from partita.theory.embracing import embracing_bound, embracing_floor, embracing_lr
from partita.theory.fedplus import (
    fedplus_bound,
    fedplus_descent,
    fedplus_kappa,
    fedplus_lr,
    fedplus_sigma,
)
from partita.theory.ffgg import (
    aggregator_constant,
    ffgg_async_bound,
    ffgg_async_lr,
    ffgg_bound,
    ffgg_lr,
    ffgg_robust_lr,
    ffgg_robust_rate,
    ffgg_robust_share,
    ffgg_steps,
)
from partita.theory.partial import (
    coupling,
    fedalt_bound,
    fedalt_eta,
    fedsim_bound,
    fedsim_eta,
    partial_lr,
)
from partita.theory.persafl import (
    fedasync_objective,
    persafl_bound,
    persafl_lr,
    persafl_maml_objective,
    persafl_me_objective,
    persafl_rounds,
)

__all__ = [
    "aggregator_constant",
    "coupling",
    "embracing_bound",
    "embracing_floor",
    "embracing_lr",
    "fedalt_bound",
    "fedalt_eta",
    "fedasync_objective",
    "fedplus_bound",
    "fedplus_descent",
    "fedplus_kappa",
    "fedplus_lr",
    "fedplus_sigma",
    "fedsim_bound",
    "fedsim_eta",
    "ffgg_async_bound",
    "ffgg_async_lr",
    "ffgg_bound",
    "ffgg_lr",
    "ffgg_robust_lr",
    "ffgg_robust_rate",
    "ffgg_robust_share",
    "ffgg_steps",
    "partial_lr",
    "persafl_bound",
    "persafl_lr",
    "persafl_maml_objective",
    "persafl_me_objective",
    "persafl_rounds",
]
