"""jattn inside other stacks: one module per host, each imported by name.

For example `import jattn.integrations.rpa`. A module imports its host only when it is used.
"""
