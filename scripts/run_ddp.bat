@echo off
rem [set CONFIG=my.yaml] scripts\run_ddp.bat [GPUS] [section.key=value ...]     GPUS: all there are; without any, 2 processes
setlocal
rem the active environment, else .venv: the first Python that has Lockstep
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
