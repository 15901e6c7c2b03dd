"""What every run imports. The forkserver imports it once, and runs start from there in no time."""

from ..models.quiet import quiet_libraries

with quiet_libraries():
    import diffusers

    diffusers.StableDiffusion3Pipeline  # noqa: B018 (diffusers imports what it is asked for)

from .. import train  # noqa: F401
