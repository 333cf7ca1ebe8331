@echo off
rem [set CONFIG=my.yaml] scripts\run_ddp.bat [GPUS] [section.key=value ...]     GPUS: all there are; without any, 2 processes
setlocal
set "GPUS="
set "OVERRIDES="
rem not %1 and %2: they are split at "=", too
for /f "tokens=1*" %%a in ("%*") do (set "GPUS=%%a" & set "OVERRIDES=%%b")
if not defined GPUS for /f %%n in ('python -c "import torch; print(torch.cuda.device_count() or 2)"') do set "GPUS=%%n"
if not defined CONFIG set "CONFIG=%~dp0..\examples\mnist.yaml"
rem PyTorch for Windows is built without libuv
set "USE_LIBUV=0"
torchrun --standalone --nproc-per-node=%GPUS% -m lockstep.worker "%CONFIG%" %OVERRIDES%
