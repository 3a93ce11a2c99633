"""Lightning callbacks that know about meshes but need no strategy of ours."""
