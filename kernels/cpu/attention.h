// Placeholder replaced in minutes.
#pragma once
