"""Modules in own/culprits.py."""

CULPRITS = {
    "Unseeded": ("random", "network.body.3 (Unseeded, "),
    "Clock": ("random", "network.body.3 (Clock, "),
    "Urandom": ("random", "network.body.3 (Urandom, "),
    "Ticket": ("random", "network.body.3 (Ticket, "),
    "Hidden": ("random", "network.body.3.noise (Unseeded, "),
    "Dice": ("state", "network.body.3.dice (Dice, "),
    "PythonDice": ("state", "network.body.3.dice (PythonDice, "),
    "FileDice": ("state", "GENERATOR (FileDice.forward, "),
    "Counting": ("state", "network.body.3.calls (Counting, "),
    "FileCounting": ("state", "CALLS (FileCounting.forward, "),
    "Queue": ("state", "network.body.3.seen (Queue, "),
    "Mean": ("state", "network.body.3.mean (Mean, "),
    "Remembering": ("state", "network.body.3.memory (Remembering, "),
    "Ranked": ("process", "network.body.3 (Ranked, "),
}
