import dataclasses

from specs import concat

# The same function by its other name.
SPEC = dataclasses.replace(concat.SPEC, name="cat", stem="concat")
