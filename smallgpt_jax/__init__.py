import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"]:  # Python looks for the module of `python -m smallgpt_jax.COMMAND`
    from smallgpt_jax.errors import exit_on_interrupt

    exit_on_interrupt()
