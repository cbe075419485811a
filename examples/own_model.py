"""Your own model on your own arrays: who gains from a personal output layer?"""

import numpy as np
from torch import nn

import partita as pt

rng = np.random.default_rng(0)  # stand-ins for your features, whose they are, and what to predict
x, client = rng.normal(size=(3000, 30)).astype("float32"), rng.integers(0, 60, size=3000)
factors, taste = x @ rng.normal(size=(30, 3)) / 30**0.5, rng.normal(size=(60, 3))
y = ((np.tanh(2 * factors) * taste[client]).sum(1) > 0).astype(int)

model = nn.Sequential(nn.Linear(30, 32), nn.Tanh(), nn.Linear(32, 2))
data = pt.data.from_arrays(x, y, client)
run = pt.federate(model, data, pt.fedalt(personal="2.*", lr=0.2), rounds=150, cohort=20, epochs=1, batch=16)
print(run.summary())
