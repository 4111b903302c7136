"""What the paper reports for time series: its Table 1, and the settings behind it."""

from primal.training import optimizers

NOTE = "the paper's; best epoch by test accuracy"

# Accuracy on the test set, in percent.

COLUMNS = (
    "Transformer",
    "Linear",
    "Reformer",
    "Longformer",
    "Performer",
    "YOSO-E",
    "cosFormer",
    "SOFT",
    "Flowformer",
    "PrimalFormer",
    "Primal.+",
)

# fmt: off
TABLE_1: dict[str, tuple[float, ...]] = {
    "EthanolConcentration": (32.7, 31.9, 31.9, 32.3, 31.2, 31.2, 32.3, 33.5, 33.8, 33.1, 35.4),
    "FaceDetection":        (67.3, 67.0, 68.6, 62.6, 67.0, 67.3, 64.8, 67.1, 67.6, 67.1, 63.8),
    "Handwriting":          (32.0, 34.7, 27.4, 39.6, 32.1, 30.9, 28.9, 34.7, 33.8, 29.6, 28.7),
    "Heartbeat":            (76.1, 76.6, 77.1, 78.0, 75.6, 76.5, 77.1, 75.6, 77.6, 76.1, 77.1),
    "JapaneseVowels":       (98.7, 99.2, 97.8, 98.9, 98.1, 98.6, 98.3, 99.2, 98.9, 98.4, 98.9),
    "PEMS-SF":              (82.1, 82.1, 82.7, 83.8, 80.9, 85.2, 83.2, 80.9, 83.8, 89.6, 90.2),
    "SelfRegulationSCP1":   (92.2, 92.5, 90.4, 90.1, 91.5, 91.1, 91.1, 91.8, 92.5, 92.5, 92.5),
    "SelfRegulationSCP2":   (53.9, 56.7, 56.7, 55.6, 56.7, 53.9, 55.0, 55.6, 56.1, 57.2, 56.1),
    "SpokenArabicDigits":   (98.4, 98.0, 97.0, 94.4, 98.4, 98.9, 98.4, 98.8, 98.8, 100., 100.),
    "UWaveGestureLibrary":  (85.6, 85.0, 85.6, 87.5, 85.3, 88.4, 85.6, 85.0, 86.6, 86.3, 88.4),
}

# What practitioners would take instead; benchmarks/results/uea_peers_cpu_2026-11-19.md measured it.

PEERS_NOTE = "aeon's, measured 2026-11-19, 3 seeds"
PEERS: dict[str, dict[str, float]] = {
    "BasicMotions":        {"MiniRocket": 100., "MultiRocketHydra": 100.},
    "Handwriting":         {"MiniRocket": 51.9, "MultiRocketHydra": 51.6},
    "JapaneseVowels":      {"MiniRocket": 98.4, "MultiRocketHydra": 98.6},
    "Libras":              {"MiniRocket": 91.3, "MultiRocketHydra": 93.3},
    "PenDigits":           {"MiniRocket": 96.9, "MultiRocketHydra": 97.3},
    "RacketSports":        {"MiniRocket": 87.1, "MultiRocketHydra": 88.2},
    "SpokenArabicDigits":  {"MiniRocket": 99.5, "MultiRocketHydra": 99.5},
    "UWaveGestureLibrary": {"MiniRocket": 93.8, "MultiRocketHydra": 93.5},
}

# The settings behind the last two columns: epochs, optimiser, then rank, η and the multiplier of
# the anchors (as many as rank × multiplier) for PrimalFormer and for Primal.+.
SETTINGS: dict[str, tuple[int, optimizers.Name, tuple[int, float, int], tuple[int, float, int]]] = {
    "EthanolConcentration": (100, "radam", (30, 0.1, 10), (40, 0.2, 10)),
    "FaceDetection":        (100, "radam", (20, 0.1, 5), (40, 0.2, 5)),
    "Handwriting":          (100, "radam", (30, 0.2, 5), (20, 0.5, 5)),
    "Heartbeat":            (100, "radam", (30, 0.5, 10), (40, 0.5, 10)),
    "JapaneseVowels":       (100, "radam", (40, 0.5, 5), (30, 0.2, 5)),
    "PEMS-SF":              (400, "radam", (40, 0.1, 5), (40, 0.0, 5)),
    "SelfRegulationSCP1":   (100, "radam", (30, 0.5, 10), (30, 0.2, 10)),
    "SelfRegulationSCP2":   (100, "radam", (20, 0.0, 10), (20, 0.2, 10)),
    "SpokenArabicDigits":   (100, "adam", (20, 0.1, 5), (30, 0.2, 5)),
    "UWaveGestureLibrary":  (100, "radam", (20, 0.0, 10), (40, 0.1, 10)),
}
# fmt: on
