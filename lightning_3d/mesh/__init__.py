"""The mesh: degrees and ranks (`spec`), nodes (`topology`), torch's DeviceMesh (`device`: the one file with torch)."""

from lightning_3d.mesh.spec import AXES, Coordinate, MeshSpec

__all__ = ["AXES", "Coordinate", "MeshSpec"]
