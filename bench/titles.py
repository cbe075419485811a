"""Does the verdict on the demo's data stay true when the seed changes?

Prints what each seed says about the means, who is named worse off beyond chance, and how often two seeds
contradict each other: one calls a difference clear that another calls clear the other way round. The demo's
offices are made so that it is known who should gain (those with a code) and who should lose (new ones).

    python bench/titles.py              # seeds 0 to 9
    python bench/titles.py --seeds 3
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from partita.engine.verdict import difference_of, trained
from partita.recipes.offices import offices

REFERENCES = ("global", "local")


def claim(facts: Any, reference: str) -> str:
    """Return what a run says of its personal models against a reference."""
    sides = (facts["training"], facts["baselines"].get(reference) or facts["training"])
    difference = difference_of(facts["intervals"].get(f"vs_{reference}"))
    if difference is None or not all(map(trained, sides)):
        return "too early"
    return "not clear" if not difference.clear else "better" if difference.mean > 0 else "worse"


def kinds(names: list[str]) -> str:
    """Return such as 'new 4, plain 2'."""
    counts = Counter(name.partition("-")[0] for name in names)
    return ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts)) or "nobody"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    claims: dict[str, list[str]] = {reference: [] for reference in REFERENCES}
    for seed in range(parser.parse_args().seeds):
        facts = offices(seed=seed).run(progress=False, executor="vmap").summary()
        for reference in REFERENCES:
            claims[reference].append(claim(facts, reference))
        chance = facts["chance"]["vs_global"]
        print(
            f"seed {seed}: vs global {claims['global'][-1]}, vs alone {claims['local'][-1]}; beyond chance "
            f"{chance['better_beyond_chance']} better, worse: {kinds(chance['clients'])}; truly lose "
            f"{chance['low']} to {chance['high']} of {chance['of']}",
            flush=True,
        )
    for reference, said in claims.items():
        opposite = said.count("better") * said.count("worse")
        print(f"vs {reference}: {dict(Counter(said))}; pairs of seeds that contradict each other: {opposite}")


if __name__ == "__main__":
    main()
