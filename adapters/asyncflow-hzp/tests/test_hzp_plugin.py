"""Registration and what can be checked before a model is loaded."""

import subprocess
import sys

from asyncflow_core.parts import PartContext
from asyncflow_core.registry import PluginEntry, Registry
from asyncflow_hzp.options import HzpOptions


def plugin():
    entry = PluginEntry("trainer", "hzp", "asyncflow_hzp.plugin", "asyncflow-hzp", "0.1.0")
    return Registry([entry]).get("trainer", "hzp")


def test_plugin_offers_the_trainer(model_dir):
    found = plugin()
    options = found.options(model=str(model_dir))
    assert type(found.factory(options, PartContext())).__name__ == "HzpTrainer"
    assert list(found.check(options)) == []
    able = found.capabilities_for(options)
    assert (able.loss_arrays, able.max_world_size, able.sharded_export) == ("torch", None, False)
    sharded = found.options(model=str(model_dir), sharded_export=True)
    assert found.capabilities_for(sharded).sharded_export


def test_check_names_the_path_of_a_missing_model(tmp_path):
    def faults(path):
        return list(plugin().check(HzpOptions(model=str(path))))

    assert "nowhere" in faults(tmp_path / "nowhere")[0]
    assert "config.json" in faults(tmp_path)[0]
    (tmp_path / "config.json").write_text("{}")
    assert "safetensors" in faults(tmp_path)[0]


def test_check_refuses_compile_with_sharded_parameters(model_dir):
    def faults(**options):
        return list(plugin().check(HzpOptions(model=str(model_dir), compile=True, **options)))

    assert "compile does not go with sharded parameters [2, 2, 2]" in faults(sharding=[2, 2, 2])[0]
    assert faults(sharding=[1, 2, 2]) == faults() == []


def test_plugin_module_imports_no_torch():
    code = (
        "import sys, asyncflow_hzp.plugin; assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
