"""jattn inside stacks that others wrote: one module per host, which imports its host when used.

    from jattn.integrations import rpa
"""
