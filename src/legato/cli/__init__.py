"""The ``legato`` command. Modules here import torch, pydantic and the like only inside a verb."""
