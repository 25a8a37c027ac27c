"""What a budget of differential privacy costs: FedAvg-FT with private rows, for several budgets.

Run: python examples/privacy.py (a minute).
"""

import perfed

TABLE = {
    "method": "fedavg-ft",
    "rounds": 10,
    "data": {"name": "digits", "clients": 5, "classes_per_client": 5, "samples": 200},
    "model": {"head": "linear"},
    "training": {"local_epochs": 1, "batch_size": 60, "lr": 3e-2},
}

for epsilon in (None, 20.0, 5.0):
    budget = {} if epsilon is None else {"privacy": {"unit": "sample", "epsilon": epsilon, "delta": 1e-3}}
    run = perfed.start(perfed.validate({**TABLE, **budget}))
    summary = run.execute()
    accuracy = 100 * summary["accuracy"]["mean"]
    if epsilon is None:
        print(f"without privacy: accuracy {accuracy:.1f} %")
    else:
        spent = max(summary["privacy"]["spent"].values())
        print(f"budget {epsilon:g}: accuracy {accuracy:.1f} %, epsilon spent at most {spent:.2f} at delta 0.001")
