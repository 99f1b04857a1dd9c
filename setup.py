"""Adds one thing to pyproject.toml: `somaspeed_patch.pth` beside the package, also in editable installs.

The .pth file lets `SOMASPEED=1` switch the patches on in any interpreter of the environment: console scripts,
`-m` launches, `torchrun` ranks and spawned data-loader workers, none of which has a place for an import.
"""

from setuptools import Distribution, setup  # first: it provides distutils on Python 3.12 and later

from distutils.command.install_data import install_data  # isort: skip


class InstallBesidePackage(install_data):
    """`data_files` go to the library folder (site-packages), not to sys.prefix."""

    def finalize_options(self):
        copied = [("install_lib", "install_dir"), ("root", "root"), ("force", "force")]
        self.set_undefined_options("install", *copied)


class DistributionWithData(Distribution):
    """Editable installs ask `has_data`, which setuptools does not define (editable_wheel._run_install)."""

    def has_data(self):
        return self.has_data_files()


setup(
    distclass=DistributionWithData,
    data_files=[("", ["somaspeed_patch.pth"])],
    cmdclass={"install_data": InstallBesidePackage},
)
