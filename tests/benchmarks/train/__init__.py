"""The benchmark `train`: a run of the trainer beside a plain script."""

from tests.benchmarks.train.measure import main as main
