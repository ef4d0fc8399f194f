"""jattn inside stacks that others wrote: one module per host, imported by its own name.

`import jattn.integrations.rpa`, say. A module imports its host only when it is used.
"""
