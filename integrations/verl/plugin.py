"""The entry point ``verl.plugins``: importing this module adds the losses to verl's.

verl imports it in every process, and hides an error of it at the log level DEBUG: ``check_verl`` shows the error.
"""

from verl.trainer.ppo import core_algos

from steadymoe.integrations.verl import losses as verl

verl.register(core_algos)
