// Every operator of the CPU core, in one translation unit per variant.
#pragma once
#include <omp.h>
#include "simd.h"
#include "gemm.h"
#include "head.h"
#include "digest.h"
#include "sampling.h"
#include "rows.h"
#include "moe.h"
#include "attention.h"
#include "attention_backward.h"
#include "recurrence.h"
#include "recurrence_backward.h"
#include "convolution.h"
#include "gates.h"
#include "gated_norm.h"
