"""What is chance and what is not: statistics of clients, seeds, methods and curves, as pure functions.

Scores come from few test samples, so that most clients that are worse in the sample are so by chance. Three
questions about who loses have three answers, each with its own function:

    ours, theirs = predicted == labels, predicted_by_global == labels     # a flag for each test sample
    changes = right_wrong(ours, theirs, data.test)       # exact McNemar tests, an interval for each client
    # or mean_changes(gains, data.test) for losses, metric_changes(auc, ...) for a metric of a whole client
    (changes.change < 0).sum()                           # worse in the sample
    worse(changes)                                       # worse beyond chance: false discovery rate 10 %
    losers(changes)                                      # Losers(estimate=6.2, low=2, high=31, of=60, ...)
    mean_interval(scores, weights=data.test[:, 1])       # scores[seed, client]; clients and seeds drawn anew
    rank_methods(scores_by_method)                       # scores[client, method]: ranks, pairs, groups
    rising(validation_scores).rising                     # True, False, or None with too few evaluations
    unlike_inputs(x, data.train).sentence(7)             # None, unless client 7 stands out

A change above zero is better. NumPy arrays come in and go out; what is drawn is a function of `seed`. How
well each of these keeps what it promises is measured by bench/coverage.py and told in docs/uncertainty.md.
"""

from partita.engine.significance.curves import Rise, rising
from partita.engine.significance.means import Interval, mean_interval
from partita.engine.significance.methods import Pair, Ranking, rank_methods
from partita.engine.significance.paired import Changes, mean_changes, metric_changes, right_wrong
from partita.engine.significance.population import Losers, losers, worse
from partita.engine.significance.unusual import Unusual, unlike_inputs, unlike_labels

__all__ = [
    "Changes",
    "Interval",
    "Losers",
    "Pair",
    "Ranking",
    "Rise",
    "Unusual",
    "losers",
    "mean_changes",
    "mean_interval",
    "metric_changes",
    "rank_methods",
    "right_wrong",
    "rising",
    "unlike_inputs",
    "unlike_labels",
    "worse",
]
