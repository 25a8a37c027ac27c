"""Tables to a model per site: six clinics with some columns in common.

Needs the extra perfed[tables]. Run: python examples/tables.py (half a minute).
"""

import numpy as np
import pandas as pd

import perfed

COLUMNS = {
    "north": ["age", "pressure", "sugar"],
    "south": ["age", "pulse"],
    "west": ["age", "pressure", "pulse"],
    "east": ["age", "sugar", "pulse"],
    "city": ["age", "pressure", "sugar", "pulse"],
    "coast": ["age", "pressure"],
}


def patients(clinic: str, rng: np.random.Generator, rows: int = 30) -> pd.DataFrame:
    """Made-up patients: everything that is measured tells something of the risk."""
    risk = rng.normal(size=rows)
    measured = {
        "age": 60 + 8 * risk + rng.normal(0, 6, rows),
        "pressure": 130 + 12 * risk + rng.normal(0, 12, rows),
        "sugar": 100 + 10 * risk + rng.normal(0, 14, rows),
        "pulse": 75 + 6 * risk + rng.normal(0, 8, rows),
    }
    table = pd.DataFrame(measured)[COLUMNS[clinic]].round(1)
    table["ill"] = np.where(risk + rng.normal(0, 0.7, rows) > 0, "yes", "no")
    return table


rng = np.random.default_rng(0)
frames = {clinic: patients(clinic, rng) for clinic in COLUMNS}


def clinics(seed: int) -> perfed.Federation:
    """Each seed tests on another fifth of every clinic's rows."""
    return perfed.Federation.from_frames(frames, target="ill", columns="named", folds=5, seed=seed)


result = perfed.compare(
    clinics,
    ["local", "mixed", "sklearn:logistic"],
    model={"head": "linear"},
    rounds=5,
    seeds=range(5),
    evaluation={"metrics": ["log-loss", "auc"]},
)
print(result.verdict)
model = result.run("mixed", seed=0).site("north")
print("north's model on its first three patients:", *model.predict(frames["north"].drop(columns="ill").head(3)))
