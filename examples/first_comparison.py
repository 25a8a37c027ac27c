"""A first comparison: does training together pay for clients that know other digits each?

Twenty clients hold four digits each, three samples of each digit.
Run: python examples/first_comparison.py (half a minute).
"""

import perfed


def clients(seed: int) -> perfed.Federation:
    """The federation of a seed: each seed draws other samples."""
    options = {"clients": 20, "classes_per_client": 4, "samples": 12, "test_samples": 200, "overlap": "test"}
    return perfed.load("digits", {"partition": "pathological", **options}, seed=seed)


result = perfed.compare(
    clients,
    ["local", "fedavg-ft", "fedpac", "sklearn:logistic"],
    model={"body": {"kind": "mlp", "hidden": [64], "out": 32}, "head": "linear"},
    rounds=30,
    training={"lr": 3e-3},
)
print(result.verdict)
print("client 003 takes:", result.best("003"))
