"""The demo: a small real model learns to turn an order in plain English into JSON."""
