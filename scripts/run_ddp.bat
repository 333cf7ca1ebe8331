@echo off
rem Train with torchrun, one process per GPU.
rem     scripts\run_ddp.bat [GPUS] [CONFIG.yaml] [section.key=value ...]
rem     scripts\run_ddp.bat [GPUS] SCRIPT.py [ARGUMENT ...]
rem GPUS: number of processes; default: all GPUs, or 2 processes if there are none. CONFIG.yaml: default examples/mnist.yaml
setlocal
rem use the first Python that has Lockstep: of the active environment, else of .venv
for %%p in (python "%~dp0..\.venv\Scripts\python.exe") do (
  %%p -c "from importlib.util import find_spec as find; exit(not (find('lockstep.run.worker') and find('torch')))" >nul 2>nul && (
    %%p "%~dp0run_ddp.py" %*
    goto end
  )
)
echo Lockstep is not installed here: activate the environment that has it 1>&2
exit /b 1
:end
exit /b %ERRORLEVEL%
